"""A run on hosts that are not there: the real controller over processes that only take the time that real ones would.

`clock.py` is the time, `shares.py` what several use at once, `seconds.py` how long work takes, `processes.py` the
processes, `world.py` hosts, links and failures, `probe.py` what a machine's parts take, `__main__.py` the page.
"""
