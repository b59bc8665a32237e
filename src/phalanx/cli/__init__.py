"""The command: what was typed becomes a launch, and how the run ended an exit code.

No logic of running lives here, and nothing here imports torch.
"""
