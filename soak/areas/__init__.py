"""One file an area: TITLE, `cases(place)`, and JOBS = 1 where its cases must not run beside each other."""
