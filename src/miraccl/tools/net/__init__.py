"""``miraccl net``: interfaces, paths to another host, rates, and the paths of a running job."""
