"""Attacks on runs of this host, a module for each side from which they come.

A module names its attacks in `ATTACKS` and the commit before the mends in `BEFORE`. An attack drives the command line
or a script in processes of their own, so that the same code runs against any tree of the source.
"""
