"""The scripts: pytorch/examples, and two loops of Accelerate's."""

from __future__ import annotations

from benchmarks.scripts.entry import Edit, Entry
from benchmarks.scripts.stand_ins import graph, images_named, pets, pictures_in_folders
from benchmarks.scripts.text import corpus
from benchmarks.scripts.waves import waves

_TWO_LOADERS = (
    "model, optimizer, train_loader, test_loader = polylane.prepare(model, optimizer, train_loader, test_loader)"
)
_ACCELERATE = (
    Edit("model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(",
         ("model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = polylane.prepare(",), replaces=True),
    Edit("accelerator.backward(loss)", ("loss.backward()",), replaces=True),
    Edit("predictions, references = accelerator.gather_for_metrics(",
         ('predictions, references = predictions, batch["{labels}"]',), replaces=True),
)  # fmt: skip


def _accelerate(labels: str) -> tuple[Edit, ...]:
    return tuple(
        Edit(edit.anchor, [line.replace("{labels}", labels) for line in edit.lines], edit.replaces)
        for edit in _ACCELERATE
    )


ENTRIES = (
    Entry(
        "mnist",
        "mnist/main.py",
        [Edit("optimizer = optim.Adadelta(", [_TWO_LOADERS])],
        "--batch-size 8 --test-batch-size 10 --epochs 2 --log-interval 1",
        draws=True,
    ),
    Entry(
        "mnist without dropout",
        "mnist/main.py",
        [Edit("optimizer = optim.Adadelta(", [_TWO_LOADERS])],
        "--batch-size 8 --test-batch-size 10 --epochs 2 --log-interval 1",
        smaller=[(r"nn\.Dropout\([\d.]+\)", "nn.Dropout(0.0)")],
    ),
    Entry(
        "mnist_rnn",
        "mnist_rnn/main.py",
        [Edit("optimizer = optim.Adadelta(", [_TWO_LOADERS])],
        "--batch-size 8 --test-batch-size 10 --epochs 2 --log-interval 1",
        draws=True,
    ),
    Entry(
        "vae",
        "vae/main.py",
        [Edit("optimizer = optim.Adam(", [_TWO_LOADERS])],
        "--batch-size 8 --epochs 2 --log-interval 1",
        data=images_named,
        smaller=[(r"recon_batch\.view\(args\.batch_size,", "recon_batch.view(-1,")],
        draws=True,
    ),
    Entry(
        "siamese_network",
        "siamese_network/main.py",
        [Edit("optimizer = optim.Adadelta(", [_TWO_LOADERS])],
        "--batch-size 8 --test-batch-size 10 --epochs 1 --log-interval 1 --lr 0.1",
        smaller=[(r"nn\.Conv2d\(1, 64,", "nn.Conv2d(1, 8,")],
    ),
    Entry(
        "super_resolution",
        "super_resolution/main.py",
        [
            Edit(
                "optimizer = optim.Adam(",
                [
                    "model, optimizer, training_data_loader, testing_data_loader = polylane.prepare(",
                    "    model, optimizer, training_data_loader, testing_data_loader)",
                ],
            )
        ],
        "--upscale_factor 2 --batchSize 4 --testBatchSize 2 --nEpochs 2 --threads 0",
        data=pictures_in_folders,
        smaller=[(r"calculate_valid_crop_size\(256,", "calculate_valid_crop_size(16,")],
    ),
    Entry(
        "imagenet",
        "imagenet/main.py",
        [
            Edit(
                "scheduler = StepLR(",
                ["model, optimizer, scheduler = polylane.prepare(model, optimizer, scheduler)"],
            )
        ],
        "--dummy -a resnet18 -b 8 -j 0 --epochs 1 --print-freq 1 --seed 1 --lr 0.01",
        smaller=[(r"pin_memory=True", "pin_memory=False")],
    ),
    Entry(
        "dcgan",
        "dcgan/main.py",
        [
            Edit(
                "optimizerG = optim.Adam(",
                [
                    "netG, netD, optimizerD, optimizerG, dataloader = polylane.prepare(",
                    "    netG, netD, optimizerD, optimizerG, dataloader)",
                ],
            )
        ],
        "--dataset fake --workers 0 --batchSize 4 --nz 8 --ngf 4 --ndf 4 --niter 1 --manualSeed 1",
    ),
    Entry(
        "word_language_model LSTM",
        "word_language_model/main.py",
        [Edit("optimizer = torch.optim.AdamW(", ["model, optimizer = polylane.prepare(model, optimizer)"])],
        (
            "--data corpus --model LSTM --emsize 8 --nhid 8 --nlayers 2 --epochs 2 --batch_size 4 --bptt 8 --dropout 0"
            " --log-interval 1 --use-optimizer --lr 0.01"
        ),
        data=corpus,
    ),
    Entry(
        "word_language_model LSTM, own update",
        "word_language_model/main.py",
        [Edit("criterion = nn.NLLLoss()", ["model = polylane.prepare(model)"])],
        (
            "--data corpus --model LSTM --emsize 8 --nhid 8 --nlayers 2 --epochs 2 --batch_size 4 --bptt 8 --dropout 0"
            " --log-interval 1 --lr 1"
        ),
        data=corpus,
    ),
    Entry(
        "word_language_model Transformer",
        "word_language_model/main.py",
        [Edit("optimizer = torch.optim.AdamW(", ["model, optimizer = polylane.prepare(model, optimizer)"])],
        (
            "--data corpus --model Transformer --emsize 8 --nhid 8 --nlayers 2 --epochs 2 --batch_size 4 --bptt 8"
            " --dropout 0 --log-interval 1 --use-optimizer --lr 0.01"
        ),
        data=corpus,
        draws=True,  # its layers' own dropout
    ),
    Entry(
        "language_translation",
        "language_translation/main.py",
        [
            Edit(
                "optim = torch.optim.Adam(",
                ["model, optim, train_dl, valid_dl = polylane.prepare(model, optim, train_dl, valid_dl)"],
            )
        ],
        (
            "-e 2 --batch 4 --attn_heads 2 --enc_layers 1 --dec_layers 1 --embed_size 8 --dim_feedforward 16"
            " --dropout 0 --logging_dir logs/"
        ),
        smaller=[(r"(?<![.\w])time\(\)", "0.0")],
    ),
    Entry(
        "time_sequence_prediction",
        "time_sequence_prediction/train.py",
        [Edit("optimizer = optim.LBFGS(", ["seq, optimizer = polylane.prepare(seq, optimizer)"])],
        "--steps 2",
        data=waves,
        smaller=[(r"future = 1000", "future = 5")],
    ),
    Entry(
        "fast_neural_style",
        "fast_neural_style/neural_style/neural_style.py",
        [Edit("vgg = Vgg16(", ["transformer, vgg, optimizer = polylane.prepare(transformer, vgg, optimizer)"])],
        (
            "train --dataset images --epochs 1 --batch-size 4 --image-size 32 --log-interval 1 --style-image style.jpg"
            " --save-model-dir saved --checkpoint-model-dir saved --checkpoint-interval 2"
        ),
        smaller=[
            (r"\b(32|64|128)\b", "8"),
            (r"time\.strftime\([^)]*\)", "''"),
        ],
    ),
    Entry(
        "gcn",
        "gcn/main.py",
        [Edit("optimizer = Adam(", ["gcn, optimizer = polylane.prepare(gcn, optimizer)"])],
        "--epochs 3 --val-every 1 --dropout-p 0 --hidden-dim 4",
        data=graph,
    ),
    Entry(
        "gat",
        "gat/main.py",
        [Edit("optimizer = Adam(", ["gat_net, optimizer = polylane.prepare(gat_net, optimizer)"])],
        "--epochs 2 --val-every 1 --dropout-p 0 --hidden-dim 4 --num-heads 2",
        data=graph,
    ),
    Entry(
        "regression",
        "regression/main.py",
        [Edit("fc = torch.nn.Linear(", ["fc = polylane.prepare(fc)"])],
        # Its steps on fourth powers enlarge what is rounded: after the 643 that it takes by itself, the plain loop that
        # averages the gradients of two half batches is off by 5e-8.
        smaller=[(r"loss < 1e-3", "batch_idx == 50")],
    ),
    Entry(
        "snli",
        "legacy/snli/train.py",
        [Edit("opt = O.Adam(", ["model, opt = polylane.prepare(model, opt)"])],
        (
            "--epochs 2 --batch_size 4 --d_embed 8 --d_proj 8 --d_hidden 8 --log_every 1 --dev_every 3 --dp_ratio 0"
            " --word_vectors= --save_every 2"
        ),
    ),
    Entry(
        "cv_example",
        "examples/cv_example.py",
        _accelerate("label"),
        "--data_dir pets --cpu",
        data=pets,
        smaller=[(r'"batch_size": 64, "image_size": 224', '"batch_size": 4, "image_size": 32'),
                 (r"num_workers=4", "num_workers=0"), (r'"num_epochs": 3', '"num_epochs": 2')],
        checkout="accelerate",
    ),
    Entry(
        "nlp_example",
        "examples/nlp_example.py",
        _accelerate("labels"),
        "--cpu",
        smaller=[(r'"batch_size": 16', '"batch_size": 8'), (r'"num_epochs": 3', '"num_epochs": 2')],
        draws=True,
        checkout="accelerate",
    ),
)  # fmt: skip
