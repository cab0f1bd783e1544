"""Bounded-staleness tables: rows that many workers read from caches of bounded age and add to (Ho et al., NIPS 2013).

Both sides: `table_spec` defines a table, `rowwise` the update rules. On the worker: `table` is the script's handle,
`worker_table` its state (a cache of rows and a log of increments), `client` the link to the server. On the server:
`table_store` holds the tables and their readers, `host` answers reads once the strategy and the clocks allow them,
`server` routes messages to it, and `traffic` delays and delivers messages.

Not public: scripts use `Session.table` and the methods of what it returns.
"""
