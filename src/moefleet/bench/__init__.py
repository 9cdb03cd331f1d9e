"""Measurements: all candidates in one run, in turn, so that noise hits them alike.

One file per thing: ``cases.py`` what is measured, ``cpu.py`` how a rank measures it on the CPU, ``comm.py`` the run
over all cases and ranks, ``report.py`` records and the table, ``plot.py`` the picture.
"""
