"""List the largest files of a folder."""

from pathlib import Path


class Task:
    def __call__(self, config):
        folder = Path(config["folder"])
        sizes = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
        largest = sorted(sizes.items(), key=lambda item: -item[1])[: config["most"]]
        print(f"{folder} has {len(sizes)} files")
        return {"files": len(sizes), "bytes": sum(sizes.values()), "largest": [list(pair) for pair in largest]}
