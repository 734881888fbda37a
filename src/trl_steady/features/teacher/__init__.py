"""The teacher: a model, an adapter, the reference or a server that scores a rollout, for its advantages."""
