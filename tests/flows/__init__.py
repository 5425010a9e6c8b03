"""The flow and its deployments, on a real Prefect server and a real Ray cluster."""
