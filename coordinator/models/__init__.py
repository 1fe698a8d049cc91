"""The models on this machine and on the hub, what fits the cluster, and jobs that download or convert models."""
