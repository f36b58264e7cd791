"""A fleet of devices on a virtual clock: who has which task when. Host only, without JAX.

What a model learns does not change when reports come. So a schedule is made first, from a seed, the devices and the
sizes of the task's clients; it may be trained afterwards (`simulation.late`).

`trace` says what devices are like, and `devices` what is drawn from that. `arrivals` is when they ask for work,
`flight` how long they take. `buffered` (FedBuff) and `synchronous` decide as the coordinator of a network does, and
`counts` counts. Devices are drawn when they ask: nothing here grows with their number.
"""
