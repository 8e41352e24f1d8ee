"""What a reader sees: report pages (report*.py), traces, the chat, charts and tables."""
