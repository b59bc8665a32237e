"""How processes talk: frames over a stream, the messages in them, and functions by value."""
