"""How the bytes of a version get from who published them to who wants them: one interface, chosen by topology.

`choice` decides (pure), `reader` does what it decided; `raw_*`, `directory` and `pair` are the ways that are not
the bulk plane's own. Importable without torch, all but `pair` and `paired`.
"""
