"""Problems that a program can make and judge."""

from cosmos_actor.python_versions import need

need("cosmos_actor.tasks")
