"""The contenders of the comparisons: paceline and its rivals, one file each, all asked the same questions.

A contender is a module with one function per question it can answer, each from a question to its answer
(`questions.py`). `isolation.ask` runs it in processes of its own. What a contender imports beyond torch is its own
affair: the benchmark that asks never loads it. Rows of results name it in the column `side`.
"""
