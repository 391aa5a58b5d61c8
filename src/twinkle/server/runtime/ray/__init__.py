"""The Ray Serve runtime: the same services and the same HTTP application, in processes that Ray looks after.

Every application of the configuration becomes an application of Serve. Gateways answer what the state alone can answer
and hand everything else to the replica that has the adapter or the sampler in question, which answers it with the
application of the embedded runtime. ``num_replicas: N`` of a model becomes N deployments of one replica each, because a
Serve handle cannot choose among the replicas of one deployment.
"""
