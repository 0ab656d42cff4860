def rows(): return []
def table(rows): return ""
