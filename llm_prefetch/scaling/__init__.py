"""More replicas, warm: Ray Serve and the cluster are asked for room, and Serve only once the files are on the nodes."""
