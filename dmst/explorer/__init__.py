"""`dmst explore`: a page in the browser that shows what a network computes of a picture, and what it does without a head.

server.py    routes, limits               session.py   networks and pictures, what is asked of them
view.py      a trace as JSON              guard.py     who may ask; headers
static/      the page
"""
