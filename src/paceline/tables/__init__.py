"""Bounded-staleness tables: rows that many workers read from caches of bounded age and add to (Ho et al., NIPS 2013).

`table_spec` says what a table is, `rules` what an update does to it. A worker has a `row_cache` and an `oplog` for each
of its tables; `table` is what its script holds, `client` the worker's end of the conversation with the server. There,
`server_table` is one table's home, `reader` what is known of a worker, and `host` answers reads when the strategy and
the clocks let them go; `server` brings messages there and back.

Not public: scripts use `Session.table`, and the methods of what it returns.
"""
