"""Where does a model come from, and how do its weights reach the engines?

`weight_source` reads the URI of the weights, for the operator and for the download alike. `weights_command` is `tidegate
weights`, which an engine's pod runs before the engine: it downloads into a cache, once for all pods that share the cache.
`hub_origin` and `bucket_origin` are the two places from which it downloads, `weight_cache` is the cache, and
`weight_report` what the download tells the operator.
"""
