"""The fault campaign: real trainings over gloo processes, each with one fault, and whether every surviving rank said in time what happened.

`trials` draws what is tried, `training` and `striking` run in the ranks, `supervisor` watches them, `verdict` judges, `compares` does the
same with whole comparisons, `command` keeps what was found and makes the tables.
"""
