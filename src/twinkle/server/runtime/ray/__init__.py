"""The Ray Serve runtime: the same services and the same HTTP application as embedded, in processes that Ray manages.

Every application of the configuration becomes an application of Serve. Gateways answer requests for which the state is
enough, and send all others to the replica that has the adapter or the sampler in question. The replica answers with its
own copy of the HTTP application. ``num_replicas: N`` of a model becomes N deployments of one replica each, because a
Serve handle cannot choose among the replicas of one deployment.
"""
