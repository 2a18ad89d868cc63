"""Train a regression on the diabetes data of scikit-learn; publish it as the next version.

Each version is trained on 100 more patients than the previous one. Run as `make_model.py [DESTINATION]`: a folder, or
an s3:// or gs:// URL; by default /tmp/cortex-diabetes.
"""

import io
import sys

import joblib
import obstore
from obstore.store import LocalStore, from_url
from sklearn.datasets import load_diabetes
from sklearn.linear_model import Ridge


def main():
    destination = sys.argv[1] if len(sys.argv) > 1 else "/tmp/cortex-diabetes"
    store = open_store(destination)
    folders = obstore.list_with_delimiter(store)["common_prefixes"]
    version = max([int(name) for name in folders if name.isdecimal()], default=0) + 1
    data, target = load_diabetes(return_X_y=True)
    patients = min(100 * version, len(data))
    regression = Ridge(alpha=0.1).fit(data[:patients], target[:patients])
    file = io.BytesIO()
    joblib.dump({"regression": regression, "patients": patients}, file)
    obstore.put(store, f"{version}/model.joblib", file.getvalue())
    print(f"wrote {destination}/{version}/model.joblib")


def open_store(destination):
    """Open a folder or a bucket; credentials and endpoint come from variables such as AWS_ACCESS_KEY_ID."""
    if "://" in destination:
        return from_url(destination, client_options={"allow_http": True})
    return LocalStore(destination, mkdir=True)


if __name__ == "__main__":
    main()
