"""Recipes: one Python function each that composes a RunConfig. `rl train NAME` finds NAME in the modules here."""
