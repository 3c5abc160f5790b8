"""Recipes: each a Python function that composes a RunConfig. `rl train NAME` finds NAME in these modules."""
