"""The real parts that tests and the demo start: Ray on several hosts, an S3 API, a Prefect server.

Nothing here is a fake. Each part is a context manager that starts processes of its own, waits until they answer,
and leaves no process, mount, network device or folder behind, however the block ends:

    from tests.real.hosts import hosts
    from tests.real.s3 import s3_server

    with hosts(n=3, root="/mnt/nvme/llm") as cluster, s3_server(host=cluster.gateway_ip) as s3:
        cluster.head.run([sys.executable, "-m", "llm_prefetch", "stage", "spec.yaml"], env=s3.env)

A run that was itself killed with SIGKILL cannot clean up; the next start of any part does it (see `processes`).
"""
