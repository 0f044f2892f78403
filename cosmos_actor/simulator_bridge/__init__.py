"""Simulators in their own world: what one is, how it attaches from its own environment, and how it is driven.

Standard library, numpy, pyzmq and msgpack; Python 3.8 or newer. `contract` is all that a simulator's author needs.
"""
