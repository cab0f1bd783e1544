"""Bounded-staleness tables: rows that many workers read from caches of bounded age and add to (Ho et al., NIPS 2013).

`table_spec` says what a table is and what an update does to it. `table` is what a worker's script holds of one, with a
`row_cache` and a log of increments; `client` is the worker's end of the conversation with the server. There,
`server_table` is one table's home, `reader` what is known of a worker, and `host` answers reads when the strategy and
the clocks let them go; `server` brings messages there and back.

Not public: scripts use `Session.table`, and the methods of what it returns.
"""
