"""Rows on the device and requests on the host: what turns prompts into results."""
