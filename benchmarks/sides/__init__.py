"""The sides of the comparisons: paceline and its rivals, one file each, all asked through the same questions.

A side is a module with one function per question it can answer, each from a question to its answer (`questions.py`).
`isolation.ask` runs it in processes of its own. What a side imports beyond torch is its own affair: the benchmark that
asks never loads it.
"""
