"""How reward functions are called.

`call_options` say how a function wants to be called, and `caller` calls it so: here, in threads, on an event loop
(`event_loop`) or in worker processes (`worker_pool`, `worker_process`, and `worker`, which runs in them). `reward_set`
holds all functions of a run, `scoring` scores one rollout with them. `http_reward` is a function that asks a service
(`json_service`, `addresses`).
"""
