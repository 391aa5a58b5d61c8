"""The Ray Serve runtime: the same services and the same HTTP application as embedded, in processes that Ray manages.

Applications of the configuration become applications of Serve, except samplers without a route. Gateways answer
requests for which the state is enough, and send others to the replica that has the adapter, sampler or processors in
question. The replica answers with its own copy of the HTTP application. ``num_replicas: N`` of a model or of processors
becomes N deployments of one replica each, because a Serve handle cannot choose among the replicas of one deployment.
"""
