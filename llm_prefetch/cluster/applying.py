"""A plan is shown in whole, and applied only while it is still true."""

from __future__ import annotations

from llm_prefetch.cluster.planning import ClusterPlan
from llm_prefetch.errors import SpecError


def require_planned(wanted: str, planned: ClusterPlan) -> None:
    """Pass if `planned`, which was made just now, is the plan whose id is `wanted`.

    Raises:
        SpecError: the spec, or what the origins hold, is another by now.
        PrefetchError: no node could plan.
    """
    if planned.id == wanted:
        return
    if len(planned.failed) == len(planned.nodes):
        require_complete(planned)
    raise SpecError(
        "the spec, or what its origins hold, has changed since it was planned; nothing was staged",
        where=f"{wanted}, now {planned.id}",
        hint="make a dry run, look at its plan, and stage with its id",
    )


def require_complete(planned: ClusterPlan) -> None:
    """Pass if every node could plan.

    Raises:
        PrefetchError: of the first that could not, with the count and the node before it.
    """
    if not planned.failed:
        return
    first, error = planned.failed[0].node, planned.failed[0].error
    assert error is not None  # noqa: S101 (for the type checker)
    count = f"{len(planned.failed)} of {len(planned.nodes)} nodes could not plan"
    raise type(error)(
        f"{count}; {first.address}: {error.message}", where=error.where, hint=error.hint
    ) from error
