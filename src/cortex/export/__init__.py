"""Container images of one project: the build context that `cortex export` writes, and its manifest for Kubernetes.

```text
cortex.yaml ─▶ secrets.py     values that must not be in an image
            ─▶ plan.py        the layers, by rate of change (pure)
            ─▶ dockerfile.py  Dockerfile, compose.yaml, README (pure)
            ─▶ kubernetes.py  Deployment, Service, volume (pure)
            ─▶ context.py     the folder: files, locked versions, `docker build`
image build ─▶ environment.py the packages of the project, built by the same code as in a deploy
```
"""
