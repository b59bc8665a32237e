"""What everybody may name: values without IO, clock, threads or torch.

`spec` is what a launch asks for, `events` what happened, `commands` what is to be done about
it, `errors` and `failures` what went wrong, and `context` the object that launcher and worker
hold: its surface, which each of them fills in.
"""
