"""The target's states of a conversation: a class per place that they come from, behind one method.

source.py           what training calls: the states of a batch, and their layout for the step
origins.py          the interface of an origin; states on a disk
served.py           states from vLLM servers: which one to ask, retries
proven_server.py    one server: its requests, and the proof that it serves the target
ahead.py            reads the states of coming steps while one runs
features.py         `drafttrain features`: from an origin to the data set's shards
server.py           the vLLM process that `drafttrain serve-target` starts
transports/         how a server's states arrive: files of a folder, or a Mooncake store
engines/            modules that vLLM's process imports
"""
