"""Seconds of messages and collectives on a cluster: the alpha-beta model over its links."""
