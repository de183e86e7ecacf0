"""Copies of popular experts: where they are, which of them a choice takes, and their weights.

Routers, parameters, optimizers and checkpoints know logical experts, E of them. A group whose
`EPConfig.n_experts` is P >= E exchanges tokens between physical experts, each of which is a copy of
a logical one. An `ExpertPlacement` says of which; its values live on the device, so another one
needs no compilation.
"""
