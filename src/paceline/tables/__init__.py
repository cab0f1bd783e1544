"""Bounded-staleness tables: rows that many workers read from caches of bounded age and add to (Ho et al., NIPS 2013).

`table_spec` says what a table is, `rowwise` what an update does to its rows. `table` is what a worker's script holds of
one, and `worker_table` what is kept for it, with a `row_cache` and a log of increments; `client` is the worker's end of
the conversation with the server. There, `table_store` has the tables and what is known of their readers, and `host`
answers reads when the strategy and the clocks let them go; `server` brings messages to it, and `traffic` says when they
arrive and takes its answers to workers.

Not public: scripts use `Session.table`, and the methods of what it returns.
"""
