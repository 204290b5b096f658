"""Which bytes move when: from a plan to extents, from extents to an engine, from a temporary file to the published one."""
