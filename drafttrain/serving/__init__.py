"""Servers: bench.py and client.py load-test one; serve_target.py starts one that hands out states.

What reads those states is drafttrain/states/.
"""
