"""``moefleet generate``: a checkpoint continues prompts, its experts spread over ranks of this machine.

``job.py`` is what ranks are told and tell, ``prompts.py`` text to tokens and back, ``ranks.py`` what a rank does,
``stream.py`` how its tokens reach the parent while it writes, ``run.py`` all of it from prompts to report.
"""
