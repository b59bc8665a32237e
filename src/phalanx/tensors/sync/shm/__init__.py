"""The `shm` backend of `torch.distributed`: collectives over shared memory, on one machine.

From the bottom up: `futex` (words to wait for), `segment` (the memory, and how ranks come to
share it), `exchange` (publishing and waiting, dead peers, wrong calls), `rounds`, `reductions`,
`movements` and `mailbox` (what goes where), `work` (who does it when), `member` (all of that
for one rank), `group` (what torch sees), `backend` (its name, and whether there is one here).
"""
