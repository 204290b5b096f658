"""What a checkpoint file holds: zip structures, their places, and the pickle. Sans-I/O: bytes and numbers in and out."""
