from cosmos_actor.python_versions import need

need("cosmos_actor.weight_plane")
