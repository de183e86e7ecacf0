"""What triggers each error of docs/errors.md, by the error's id."""

from error_triggers import calls, checkpoints, integrations, layers, placements, setup

TRIGGERS = {}
for _part in (setup, calls, layers, placements, checkpoints, integrations):
    assert not TRIGGERS.keys() & _part.TRIGGERS.keys()
    TRIGGERS |= _part.TRIGGERS
