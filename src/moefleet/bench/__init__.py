"""Measurements: all candidates in one run, in turn, so that noise hits them alike.

One file per thing. What is measured: ``cases.py`` (``bench comm``), ``layers.py`` with ``shapes.py`` (``bench layer``),
``generation.py`` (``bench model``). The run over cases, ranks and rounds: ``comm.py`` with ``rank.py`` for comm (whose
candidates are in ``cpu.py``) and layer, ``model.py``; ``matrix.py`` runs the cases that ``notebook.py``, the JSON file,
does not have yet. What comes of it: ``records.py``, ``report.py`` the tables, ``plot.py`` the picture. ``gpu*.py`` are
``bench comm`` on GPUs, whose candidates are other libraries too.
"""
