"""A parser of report pages, which checks that tags are closed."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "link", "br", "path", "rect", "use", "circle", "line"}


class Page(HTMLParser):
    """Checks that tags close in order, and gathers what a page refers to."""

    def __init__(self, text):
        super().__init__()
        self.open = []
        self.ids = []
        self.links = []
        self.text = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.links += [attrs[key] for key in ("href", "src", "xlink:href") if key in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)
