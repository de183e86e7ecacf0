"""disabled_checks: what `jax.export` needs to know about the custom calls of this package."""

from jax.export import DisabledSafetyCheck

from jax_ep.xla_ffi.lowering import TARGETS


def disabled_checks() -> list[DisabledSafetyCheck]:
    """Allows `jax.export` to export every custom call of this package, on any platform.

    `jax.export` refuses custom calls that it does not know. Ours may be exported: programs name
    their group by a key, which follows from the mesh's shape, its device ids and the arguments of
    `ep_init`. The process that runs the program must have an equal group open (docs/sharp_bits.md).

        checks = jax_ep.disabled_checks()
        exported = jax.export.export(jax.jit(layer), disabled_checks=checks)(*shapes)

    Returns:
        The argument `disabled_checks` of `jax.export.export`. Targets that a program does not call
        have no effect; add your own to the list.
    """
    return [DisabledSafetyCheck.custom_call(target) for target in TARGETS]
