"""Probing: what a filesystem and the machine around it can do, measured with the engines that save and load use."""
