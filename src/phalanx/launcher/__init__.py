"""What runs in the user's process: it starts the agent and relays events and results."""
