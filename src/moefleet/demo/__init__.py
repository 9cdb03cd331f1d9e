"""What ``moefleet demo`` shows: a real model continues texts with its experts spread over ranks of this machine.

``run.py`` all of it in order, ``job.py`` the values that travel, ``ranks.py`` what a rank does, ``beacon.py`` how it
tells how far it is, ``alone.py`` the same in one process, ``report.py`` whether both agree, ``show.py`` the terminal.
"""
