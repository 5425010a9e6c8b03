"""The doctor: looks at Prefect, at the cluster and at the nodes, and says in one line each what is wrong and the mend."""

from llm_prefetch.doctor.cluster import cluster_findings
from llm_prefetch.doctor.findings import Finding, Outcome, healthy
from llm_prefetch.doctor.machine import look
from llm_prefetch.doctor.nodes import store_findings
from llm_prefetch.doctor.prefect import prefect_findings

__all__ = ["Finding", "Outcome", "cluster_findings", "healthy", "look", "prefect_findings", "store_findings"]
